"""Text and rows of files of foreign formats, each format in a module of its own.

A small file of such a format can take minutes or all memory to read. `parser_process` therefore
runs `server` in a process of its own, with limits.
"""
