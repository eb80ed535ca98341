"""Files that others may have written: which of them are read, whether they are whole, what they say.

    stores      where they lie: a file system, or a store behind an `fsspec` URL
    paths       those inside a checkpoint's folder, and no others
    manifest    JSON whose entries have the types they should; digests of files
    tensors     the one reader of safetensors files

No rank waits for another in any of it, and nothing in a file is executed.
"""
