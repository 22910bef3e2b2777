"""Training data: where it is, and which samples each rank reads.

Without torch, so that login nodes can use them: `datasets` (the files of each dataset and their
folders), `classfolder` (class folders), `cifar10` (conversion), `pillow` (decoding with Pillow
alone), `text` and `sentences` (token IDs). With torch: `sampling` (which samples each rank takes),
`in_memory` (small sets), `decode`, `image_sets` (large sets), `torch_loader` (any torch data set or
stream). `packed` reads and writes packed copies of image folders. `launch` imports `datasets`
alone.
"""
