"""Several machines, played by network namespaces of one: see scripts/two_hosts.py."""
