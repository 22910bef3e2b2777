"""Bugs in checkpoints, resume, agreement of the ranks, optimisation, metrics and the recipes."""

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        "recipes/core/train/loop.py",
        'measured["samples_per_second"] / run.world.data.size',
        'measured["samples_per_second"]',
        "tflops is that of all ranks",
        "tests/distributed/train/test_meter.py::"
        "test_the_time_of_each_rank_and_the_first_thing_to_change",
    ),
    Mutation(
        "recipes/core/train/world.py",
        "                seen = progress\n",
        "",
        "a rank that repeats the same progress counts as one that makes some",
        "tests/distributed/train/test_step.py::test_all_ranks_end_if_one_fails",
    ),
    Mutation(
        "recipes/core/train/rendezvous.py",
        "max(timeout_s - EARLIER_S, SHARE_EARLIER * timeout_s)",
        "SHARE_EARLIER * timeout_s",
        "the other ranks wait for rank 0 for three quarters of timeout_s",
        "tests/distributed/train/test_loop.py::"
        "test_ranks_of_another_job_or_attempt_do_not_meet_and_rank_0_waits_longest",
    ),
    Mutation(
        "recipes/finetune.py",
        "seeded(cfg.seed, epoch, -batch)",
        "seeded(cfg.seed, 0, -batch)",
        "each epoch blends the images of a batch in the same way",
        "tests/distributed/recipes/test_finetune.py::test_class_weights_and_mixing_change_the_loss",
    ),
    Mutation(
        "recipes/core/train/failure.py",
        "keepalive.LOST_S) if run.world.links.lost else",
        "keepalive.LOST_S) if False else",
        "the loss of a node is noticed only after timeout_s",
        "tests/distributed/train/test_loop.py::"
        "test_a_wait_without_a_rank_behind_times_out_as_a_network_problem",
    ),
    Mutation(
        "recipes/core/train/failure.py",
        "if client.silent_nodes([first, mine]) == {first}:",
        "if client.silent_nodes([first, mine]):",
        "a node that has lost its network requeues a job that is about to restart without it",
        "tests/distributed/train/test_guards.py::"
        "test_a_rank_of_the_second_node_requeues_a_job_whose_first_node_is_gone",
    ),
    Mutation(
        "recipes/core/train/meter.py",
        "memory[host] += size",
        "memory[host] = size",
        "the memory of a node is that of its last rank",
        "tests/distributed/train/test_meter.py::test_what_the_ranks_of_uneven_nodes_use",
    ),
    Mutation(
        "recipes/core/run/trackers.py",
        "max(run.saved_step - 1,",
        "max(run.saved_step,",
        "a row whose evaluation was postponed is exported without its results, and never again",
        "tests/unit/run/test_trackers.py",
    ),
    Mutation(
        "recipes/core/train/loop.py",
        "        run.results = {} if cut_short else results\n        run.stopping = reason if "
        'cut_short else ""\n',
        '        run.results = results\n        run.stopping = ""\n',
        "an own metric of an evaluation that a stop has cut short is recorded and never repeated",
        "tests/distributed/train/test_loop.py",
    ),
    Mutation(
        "recipes/core/train/checkpoint.py",
        'torch.load(io.BytesIO(part), map_location="cpu", weights_only=True) for part in rng',
        'torch.load(io.BytesIO(part), map_location="cpu", weights_only=False) for part in rng',
        "a stranger in the place of a rank runs code in rank 0",
        "tests/unit/other_users/test_read.py",
    ),
    Mutation(
        "recipes/core/train/agreement.py",
        "[bool(reason), save,",
        "[bool(reason) and world.rank == 0, save,",
        "a signal to a rank other than 0 is ignored",
        "tests/distributed/train/test_exact_resume.py",
    ),
    Mutation(
        "recipes/core/train/resume.py",
        'checkpoint.set_rng_state(content["rng"][world.rank], world.device)',
        'checkpoint.set_rng_state(content["rng"][0], world.device)',
        "after a resume, all ranks have the random state of rank 0",
        "tests/distributed/train/test_exact_resume.py",
    ),
    Mutation(
        "recipes/core/train/resume.py",
        "    if other:\n",
        "    if other and world.rank == 0:\n",
        "machines with different keys train one model with two learning rates",
        "tests/distributed/train/test_guards.py",
    ),
    Mutation(
        "recipes/core/train/checkpoint.py",
        "            state.optimizer.load_state_dict(\n                "
        'sharding.state_of(state.optimizer, content["optimizer"])\n            )\n',
        "",
        "a resumed run has lost its momentum",
        "tests/distributed/train/test_exact_resume.py",
    ),
    Mutation(
        "recipes/core/train/checkpoint.py",
        "(step > newest, -step)",
        "(step > newest, step)",
        "a run resumes from its oldest checkpoint",
        "tests/distributed/train/test_saving.py::test_candidates_are_checkpoints_newest_first",
    ),
    Mutation(
        "recipes/core/train/checkpoint.py",
        "self._write, self._copy.take(kept),",
        "self._write, kept,",
        "a checkpoint contains weights of later steps",
        "tests/distributed/train/test_saving.py::test_changes_after_the_call_are_not_saved",
    ),
    Mutation(
        "recipes/core/train/checkpoint.py",
        'stay = {named(folder, "latest"), named(folder, "best")}',
        'stay = {named(folder, "latest")}',
        "the best checkpoint is removed",
        "tests/distributed/train/test_loop.py::test_the_best_evaluation_is_saved_as_best",
    ),
    Mutation(
        "recipes/core/files.py",
        "            file.flush()\n            os.fsync(file.fileno())\n",
        "            file.flush()\n",
        "after a crash of the machine, a file with its final name is empty",
        "tests/faults/test_checkpoints.py::"
        "test_after_a_kill_at_any_write_of_a_save_the_old_or_new_checkpoint_is_valid",
    ),
    Mutation(
        "recipes/core/train/session.py",
        "return EXIT_REQUEUE if current.stopping else EXIT_DONE",
        "return EXIT_DONE",
        "a stopped run ends with status 0, and is not requeued",
        "tests/distributed/train/test_exact_resume.py",
    ),
    Mutation(
        "recipes/core/train/run.py",
        "1_000_003 + self.world.rank + 1",
        "1_000_003 + 1",
        "dropout has the same mask on all ranks",
        "tests/distributed/train/test_exact_resume.py",
    ),
    Mutation(
        "recipes/core/train/outcome.py",
        "sign * score <= sign",
        "sign * score >= sign",
        "`best` names the worst evaluation",
        "tests/distributed/train/test_loop.py",
    ),
    Mutation(
        "recipes/core/train/session.py",
        "        start.pulse.watch(keys.timeout_s + watchdog.MARGIN_S, files.ROOT)\n",
        "",
        "there is no watchdog: a rank that hangs blocks its nodes until the time limit",
        "tests/distributed/train/test_guards.py",
    ),
    Mutation(
        "recipes/core/train/session.py",
        "        os.umask(int(keys.umask, 8))\n",
        "",
        "umask= has no effect, and all users can read the checkpoints",
        "tests/distributed/train/test_guards.py",
    ),
    Mutation(
        "recipes/core/train/session.py",
        "        if world.rank == 0:",
        "        if world.rank < 0:",
        "an attempt that counted as ended still writes into the run directory of the next attempt",
        "tests/distributed/train/test_guards.py",
    ),
    Mutation(
        "recipes/core/train/loop.py",
        "if save or stop or last or best:",
        "if save or last or best:",
        "a run that receives a signal loses all steps since its last checkpoint",
        "tests/distributed/train/test_exact_resume.py",
    ),
    Mutation(
        "recipes/core/train/loop.py",
        "            best = outcome.is_best(run) and run.keys.keep_best\n",
        "            best = run.keys.keep_best and outcome.is_best(run)\n",
        "with keep_best=false, patience= never ends a run",
        "tests/distributed/train/test_loop.py::"
        "test_patience_counts_from_the_best_evaluation_if_it_is_not_saved",
    ),
    Mutation(
        "recipes/core/train/sharding.py",
        "(ranks // size, size)",
        "(size, ranks // size)",
        "with several copies of a model, its checkpoint misses a part of the weights",
        "tests/distributed/train/test_sharding.py::"
        "test_each_copy_of_a_model_is_divided_over_shard_size_ranks",
    ),
    Mutation(
        "recipes/core/train/optimisation.py",
        "return min(batches.global_batch_size, batches.num_samples) / size if size else 1.0",
        "return size / min(batches.global_batch_size, batches.num_samples) if size else 1.0",
        "a larger batch has a smaller learning rate",
        "tests/distributed/train/test_arithmetic.py",
    ),
    Mutation(
        "recipes/core/train/optimisation.py",
        "                1 - self._decay,",
        "                self._decay,",
        "the averaged weights are nearly the newest weights",
        "tests/distributed/train/test_arithmetic.py::"
        "test_averaged_weights_scale_with_the_batch_size_and_resume",
    ),
    Mutation(
        "recipes/core/train/scores.py",
        "hits[:, 0].sum(), hits.sum()",
        "hits.sum(), hits[:, 0].sum()",
        "top-1 and top-5 accuracy are exchanged",
        "tests/distributed/train/test_arithmetic.py",
    ),
    Mutation(
        "recipes/core/train/metrics.py",
        'if self._file.read(1) not in (b"", b"\\n"):',
        "if False:",
        "a row that a kill has cut damages the first row of the next attempt",
        "tests/distributed/train/test_saving.py",
    ),
    Mutation(
        "recipes/core/train/device.py",
        'return torch.device("cuda", info.local_rank)',
        'return torch.device("cuda", info.rank)',
        "the ranks of the second node select GPUs that do not exist",
        "tests/distributed/train/test_device.py::test_a_rank_takes_its_gpu",
    ),
    Mutation(
        "recipes/core/train/step.py",
        "(loss * (self._scale * world.data.size / self.part.global_size))",
        "(loss / self.part.global_size)",
        "with more ranks, the gradients are smaller",
        "tests/distributed/train/test_arithmetic.py::test_a_step_of_toy_equals_the_formula",
    ),
    Mutation(
        "recipes/core/train/step.py",
        "run.world.sum(torch.stack(self._weights).sum().double())",
        "run.world.data.size * torch.stack(self._weights).sum().double()",
        "each rank divides by its own tokens: the loss is a mean of means",
        "tests/distributed/train/test_step.py::"
        "test_weights_give_the_mean_over_all_tokens_of_the_batch",
    ),
    Mutation(
        "recipes/mnist.py",
        "MEAN = 0.1307 * 255\nSTD = 0.3081 * 255",
        "MEAN = 0.1307\nSTD = 0.3081",
        "mnist: the pixels are normalised as if they were 0 to 1",
        "tests/distributed/recipes/test_mnist.py::"
        "test_training_images_are_shifted_and_normalised_and_the_loss_is_that_of_their_labels",
    ),
    Mutation(
        "recipes/cifar.py",
        "cfg.seed, *world.data, *digests\n",
        "cfg.seed, *world.data\n",
        "cifar: a resumed run continues with other images",
        "tests/distributed/recipes/test_cifar.py::test_a_run_is_not_resumed_with_different_images",
    ),
    Mutation(
        "recipes/gpt.py",
        "losses.double().sum() * cfg.seq_len",
        "losses.double().mean() * EVAL_BATCH * cfg.seq_len",
        "gpt: the last batch of an evaluation counts as if it were full",
        "tests/distributed/recipes/test_gpt.py::test_bits_per_byte_by_hand",
    ),
    Mutation(
        "recipes/llm.py",
        "rows.positions if cfg.pack else None",
        "None",
        "llm: packed examples attend to each other",
        "tests/distributed/recipes/test_llm.py::test_the_losses_are_those_of_a_plain_loop",
    ),
    Mutation(
        "recipes/core/train/causal.py",
        "+ scale * added",
        "+ added",
        "llm: an exported model has other low-rank additions than the trained one",
        "tests/distributed/recipes/test_llm.py::"
        "test_an_exported_model_has_the_logits_of_the_evaluation",
    ),
    Mutation(
        "recipes/core/train/causal.py",
        'if report["missing_keys"]:',
        "if False:",
        "llm: weights that a model's files lack are random",
        "tests/distributed/recipes/test_llm.py::"
        "test_models_that_are_not_usable_are_refused_with_the_fix",
    ),
    Mutation(
        "recipes/core/data/hub.py",
        "if allow_code != allowed:",
        "if not allow_code:",
        "llm: code of a model runs that was changed after it was read",
        "tests/distributed/recipes/test_llm.py::"
        "test_code_of_a_model_runs_only_if_its_digest_is_given",
    ),
    Mutation(
        "recipes/imagenet.py",
        "loader.in_order(validation, part,",
        "loader.in_order(loader._training.dataset.dataset, part,",
        "imagenet: the evaluation uses training images",
        "tests/distributed/recipes/test_imagenet.py::"
        "test_validation_images_equal_torchvisions_presets",
    ),
    Mutation(
        "recipes/imagenet.py",
        "MEAN = (123.675, 116.28, 103.53)\nSTD = (58.395, 57.12, 57.375)",
        "MEAN = (103.53, 116.28, 123.675)\nSTD = (57.375, 57.12, 58.395)",
        "imagenet: red and blue are normalised with each other's mean",
        "tests/distributed/recipes/test_imagenet.py::"
        "test_validation_images_equal_torchvisions_presets",
    ),
    Mutation(
        "recipes/core/train/saving.py",
        "self._saved_at = self.world.clock.now()\n        self.world.pulse",
        "self.world.pulse",
        "checkpoint_every_s= saves again soon after another save",
        "tests/distributed/train/test_loop.py::test_any_save_postpones_the_next_save_by_time",
    ),
    Mutation(
        "recipes/core/train/loop.py",
        "enumerate(losses, self.agreed_at - len(losses) + 1)",
        "enumerate(losses, self.agreed_at)",
        "the message about a loss that is not finite names a later step",
        "tests/distributed/train/test_loop.py",
    ),
    Mutation(
        "recipes/core/train/failure.py",
        'directory.read_status(run.dir).get("step", 0)',
        "run.step",
        "a resumed run that is stopped before its first step has saved step 0",
        "tests/distributed/train/test_loop.py::test_a_stop_before_the_first_step_is_not_a_failure",
    ),
]
