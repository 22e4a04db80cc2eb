"""How families of models write an answer: reasoning, text and tool calls, told apart while the answer arrives."""
