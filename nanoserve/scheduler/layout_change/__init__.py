"""Changes between parallel layouts: the device is drained, and the blocks are those of the new
layout."""
