"""Where the engine meets torch.compile and Inductor: `layer_runner` runs layers, `aot_build`
compiles them ahead."""
