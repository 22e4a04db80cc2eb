"""The recurrent states of a stage's layers, and where the rows of a step find theirs."""
