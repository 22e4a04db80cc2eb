"""Several machines, played by network namespaces of one: needs Linux, root and the command ip."""
