"""Training data: where it is, and which samples each rank reads.

Without torch, so that login nodes can use them: `datasets` (the files of each dataset and their
folders), `classfolder` (class folders), `cifar10` (conversion), `pillow` (decoding with Pillow
alone), `documents`, `text` and `sentences` (token IDs), `chat`, `dialogues` and `made_dialogues`
(the same of dialogues), `hub` (models of Hugging Face), `progress`. With torch: `sampling` (which
samples each rank takes), `token_batches` (the same by tokens), `in_memory` (small sets), `decode`,
`image_sets` (large sets), `labelled` (one's own images), `torch_loader` (any torch data set or
stream). `packed` reads and writes packed copies of image folders. `launch` imports `datasets`
alone.
"""
