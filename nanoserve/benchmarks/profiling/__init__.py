"""The offline profiler behind ``nanoserve profile`` (APEX): measuring.py first; nothing here is imported for --help."""
