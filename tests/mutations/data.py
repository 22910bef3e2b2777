"""Bugs in sampling, reading, packing, staging and downloading of data."""

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        "recipes/core/data/token_batches.py",
        "positions[place] = np.arange(end - begin)",
        "pass",
        "packed examples attend to each other",
        "tests/unit/data/test_token_batches.py::test_rows_have_positions_in_each_example",
    ),
    Mutation(
        "recipes/core/data/chat.py",
        "(ends > first) & (begins < last)",
        "(ends >= first) & (begins <= last)",
        "the loss counts tokens beside the turns of the assistant",
        "tests/unit/data/test_dialogues.py::"
        "test_the_loss_counts_the_assistants_tokens_and_their_end_only",
    ),
    Mutation(
        "recipes/core/data/dialogues.py",
        "os.path.realpath(path) for group in held_out",
        "str(path) for group in held_out",
        "files of val= that source= names by another path are also trained on",
        "tests/unit/data/test_dialogues.py::"
        "test_a_held_out_part_is_drawn_by_the_seed_or_read_from_files",
    ),
    Mutation(
        "recipes/core/data/torch_loader.py",
        "        time.sleep(WORKER_END_S)\n",
        "",
        "a worker that is killed while it passes on a batch is an error of a socket",
        "tests/unit/data/test_torch_loader.py::"
        "test_a_worker_that_is_killed_while_it_passes_on_a_batch_is_named",
    ),
    Mutation(
        "recipes/core/data/decode.py",
        "cv2.resize(pixels, (width, height)",
        "cv2.resize(pixels, (height, width)",
        "with decoder=opencv, images that are not square are squeezed",
        "tests/unit/data/test_images.py::test_opencvs_pixels_are_close_to_torchvisions",
    ),
    Mutation(
        "recipes/core/data/documents.py",
        "path.stat().st_size, path.stat().st_mtime_ns)",
        "path.stat().st_size)",
        "a text that was edited without a change of its size is not read again",
        "tests/unit/data/test_text.py::test_a_source_that_has_changed_is_read_again",
    ),
    Mutation(
        "recipes/core/data/sampling.py",
        "begin = rank * each + min(rank, more)",
        "begin = rank * each",
        "if the ranks do not divide a batch, some samples occur twice and some never",
        "tests/distributed/train/test_samples.py::"
        "test_shares_are_a_partition_of_sizes_that_differ_by_one",
    ),
    Mutation(
        "recipes/core/data/sampling.py",
        "generator=generator(self.seed, epoch))\n        begin",
        "generator=generator(self.seed, 0))\n        begin",
        "every epoch has the same order",
        "tests/distributed/train/test_samples.py::test_each_seed_and_epoch_has_its_own_order",
    ),
    Mutation(
        "recipes/core/data/sampling.py",
        "            begin += size",
        "                begin += size",
        "a run that resumes within an epoch repeats samples",
        "tests/distributed/train/test_samples.py::"
        "test_the_batches_of_an_epoch_do_not_depend_on_the_number_of_ranks",
    ),
    Mutation(
        "recipes/core/data/in_memory.py",
        "return part(*paths[:2]), part(*paths[2:4])",
        "return part(*paths[:2]), part(*paths[:2])",
        "MNIST and CIFAR-10 are evaluated on their training sets",
        "tests/distributed/recipes/test_mnist.py::test_the_test_set_is_not_the_training_set",
    ),
    Mutation(
        "recipes/core/data/image_sets.py",
        "(black, IGNORE)",
        "(black, 0)",
        "an unreadable image is trained as class 0",
        "tests/unit/data/test_images.py::test_an_unreadable_image_is_skipped_named_and_counted",
    ),
    Mutation(
        "recipes/core/data/torch_loader.py",
        "part.indices.tolist() or [0])",
        "sorted(part.indices.tolist()) or [0])",
        "the images of a batch have the labels of other images",
        "tests/unit/data/test_images.py::test_labels_are_the_folders_and_pieces_keep_them",
    ),
    Mutation(
        "recipes/core/data/torch_loader.py",
        "if self._evaluation is None or self._evaluation.dataset.dataset is not dataset:",
        "if self._evaluation is None:",
        "a second evaluation set is evaluated with the samples of the first",
        "tests/unit/data/test_torch_loader.py::test_evaluations_of_two_sets_read_each_its_own",
    ),
    Mutation(
        "recipes/core/data/classfolder.py",
        "sorted(name for name in folders if not _is_hidden(name))",
        "(name for name in folders if not _is_hidden(name))",
        "the labels depend on the order in which the file system lists folders",
        "tests/unit/data/test_classfolder.py",
    ),
    Mutation(
        "recipes/core/data/classfolder.py",
        "(real in seen or os.path.commonpath([top, real]) == real)",
        "(real in seen)",
        "a link to the folder above a class gives images of other classes this class",
        "tests/unit/data/test_classfolder.py::test_a_linked_folder_is_read_once",
    ),
    Mutation(
        "recipes/core/data/labelled.py",
        "first[0] != number and not (split and first[1:] == (labels, split))",
        "first[0] != number and not first[1:] == (labels, split)",
        "an image that has two rows in a CSV is in the training and the validation set",
        "tests/unit/data/test_labelled.py::test_a_faulty_table_is_refused_by_line",
    ),
    Mutation(
        "recipes/core/data/classfolder.py",
        "listing.add(positions[name], file)",
        "listing.add(done, file)",
        "if val/ lacks a class, the labels of the next classes are wrong",
        "tests/unit/data/test_classfolder.py",
    ),
    Mutation(
        "recipes/core/data/packed/write.py",
        "RECORD.pack(size, ",
        "RECORD.pack(0, ",
        "a packed copy contains wrong positions from the second sample of a file on",
        "tests/unit/data/test_packing.py::test_a_packed_copy_has_the_documented_format",
    ),
    Mutation(
        "recipes/core/data/packed/stage.py",
        "fault = datasets.content_fault(content, file)",
        "fault = None",
        "a damaged file is staged, and the run trains on it",
        "tests/unit/data/test_staging.py::test_a_damaged_source_is_named_and_never_staged",
    ),
    Mutation(
        "recipes/core/trust.py",
        "status.st_uid != os.geteuid()",
        "status.st_uid == -1",
        "code of jobs is kept in the folder of another user",
        "tests/unit/other_users/test_groups.py::test_a_clone_of_root_that_users_can_only_read",
    ),
    Mutation(
        "recipes/prepare.py",
        "fault = datasets.content_fault(content, file)\n",
        "fault = None\n",
        "a download with another SHA-256 is accepted",
        "tests/unit/data/test_prepare.py::test_a_damaged_source_is_refused",
    ),
    Mutation(
        "recipes/core/data/torch_loader.py",
        "if skipped and len(bad) > max(MOST_SKIPPED, FRACTION * seen):",
        "if skipped and len(self.skipped) > max(MOST_SKIPPED, FRACTION * seen):",
        "unreadable samples of all epochs together end the run",
        "tests/unit/data/test_torch_loader.py::test_a_sample_that_is_skipped_again_counts_once",
    ),
    Mutation(
        "recipes/core/report/figure.py",
        "pad = abs(low) * 0.1",
        "pad = low * 0.1",
        "the page of a run with a constant negative metric cannot be made",
        "tests/unit/report/test_page.py",
    ),
    Mutation(
        "recipes/prepare.py",
        "prepare_weights(WeightsKeys(keys.arch, keys.pretrained), data_dir)",
        "prepare_weights(WeightsKeys(keys.arch), data_dir)",
        "prepare finetune fetches other weights than pretrained= names",
        "tests/unit/data/test_labelled.py",
    ),
]
