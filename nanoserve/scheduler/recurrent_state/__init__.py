"""Recurrent states of sequences: slots that hold them, snapshots at which a prefix can be resumed,
and where the rows of a plan find and leave them."""
