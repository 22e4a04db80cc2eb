"""What ran when: traces for ui.perfetto.dev, phases and stage times."""
