"""Text and rows of files in foreign formats, one module per format.

Even a small file in such a format can take minutes or all memory to read. `parser_process`
therefore runs `server` in a separate process with limits.
"""
