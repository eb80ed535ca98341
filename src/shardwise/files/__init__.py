"""Files that others may have written: which of them are read, whether they are whole, what they say.

    paths       those inside a checkpoint's folder, and no others
    manifest    JSON whose entries have the types they should; digests of files
    tensors     the one reader of safetensors files

All of it is local, and nothing in a file is executed.
"""
