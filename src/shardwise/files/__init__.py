"""Files that others may have written: where they are, whether they are intact, what they contain.

    stores      where files are: a file system, or a store behind an `fsspec` URL
    manifest    files inside a checkpoint's folder, and no others; JSON of checked types; digests of files
    tensors     the only reader of safetensors files

No function here waits for another rank, and nothing in a file is executed.
"""
