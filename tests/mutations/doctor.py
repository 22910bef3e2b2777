"""Bugs in the examination of nodes, the verdict, and the explanation of a failure."""

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        "recipes/core/doctor/judge.py",
        "if entry.bad and entry.leave_out for node",
        "if entry.bad and entry.leave_out and len(verdict.hosts) > 1 for node",
        "a single bad node is not excluded",
        "tests/unit/doctor/test_verdict.py",
    ),
    Mutation(
        "recipes/core/doctor/probes.py",
        "count = None if granted else len(seen)",
        "count = len(seen) if granted else None",
        "nodes with 8, 8 and 4 granted GPUs count as unequal",
        "tests/unit/doctor/test_gpus.py",
    ),
    Mutation(
        "recipes/core/doctor/verdict.py",
        "return not any(entry.bad for entry in self.entries)",
        "return not self.exclude",
        "a finding that accuses no single node lets the doctor end with status 0",
        "tests/unit/doctor/test_verdict.py",
    ),
    Mutation(
        "recipes/core/doctor/judge.py",
        "silent = [node for node in range(count) if node not in reports",
        "silent = [node for node in range(count - 1) if node not in reports",
        "the last node is not named if it gives no report",
        "tests/unit/doctor/test_verdict.py",
    ),
    Mutation(
        "recipes/core/doctor/judge.py",
        'if gpu["tflops"] < SLOW * middle:',
        'if gpu["tflops"] > SLOW * middle:',
        "healthy GPUs count as slow, and a slow GPU counts as healthy",
        "tests/unit/doctor/test_verdict.py",
    ),
    Mutation(
        "recipes/core/doctor/judge.py",
        '    "gpu_count": "the number of GPUs",\n',
        "",
        "a node with seven of eight GPUs does not change the doctor's status",
        "tests/unit/doctor/test_verdict.py",
    ),
    Mutation(
        "recipes/core/doctor/judge.py",
        "leave_out and not is_shared, nodes)",
        "leave_out, nodes)",
        "a fault that all nodes share excludes all nodes",
        "tests/unit/doctor/test_verdict.py",
    ),
    Mutation(
        "recipes/core/doctor/judge.py",
        "bad = max((node, peer), "
        "key=lambda end: (end in known_bad, failed[end] / tried[end], end))",
        "bad = max((node, peer), key=lambda end: (end in known_bad, -failed[end] / tried[end], "
        "end))",
        "the doctor excludes the healthy node of a failing link",
        "tests/unit/doctor/test_verdict.py",
    ),
    Mutation(
        "recipes/core/doctor/probes.py",
        "bad=free < 64 << 20",
        "bad=False",
        "a node with a full /dev/shm is not excluded",
        "tests/unit/doctor/test_probes.py",
    ),
    Mutation(
        "recipes/core/doctor/examine.py",
        "code = errors.EXIT_DONE if judged.healthy else errors.EXIT_MACHINE",
        "code = errors.EXIT_DONE",
        "the doctor ends with status 0, whatever it finds",
        "tests/unit/doctor/test_examine.py::"
        "test_the_status_says_whether_a_node_is_bad_and_doctor_json_which",
    ),
    Mutation(
        "recipes/core/doctor/examine.py",
        '"early": stage_of(report) < Stage.final',
        '"early": False',
        "a node that hangs in an all_reduce counts as healthy",
        "tests/unit/doctor/test_examine.py::"
        "test_a_node_without_a_final_report_is_judged_by_its_first_or_named_as_silent",
    ),
    Mutation(
        "recipes/core/doctor/gpucheck.py",
        "is_correct = torch.equal((a.to(device) @ b.to(device)).cpu(), a @ b)",
        "is_correct = (a.to(device) @ b.to(device)).cpu().shape == a.shape",
        "a GPU that computes wrong results is not found",
        "tests/distributed/train/test_collectives.py::test_a_gpus_speed_and_result",
    ),
    Mutation(
        "recipes/core/doctor/explain.py",
        "patterns = sorted(by_pattern, key=lambda pattern: pattern.level)",
        "patterns = sorted(by_pattern, key=lambda pattern: -pattern.level)",
        "the diagnosis names a consequence, not its cause",
        "tests/unit/doctor/test_logs.py",
    ),
]
