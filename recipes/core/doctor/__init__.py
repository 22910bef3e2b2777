"""Examines the nodes of an allocation, checks environment variables, and explains why a run failed.

    examine         an examination of all nodes; uses the modules below
    reports         one report file of each node, in the run directory
    probes          checks of one node: its disks, versions, network and GPUs
    reach           whether a node reaches others over TCP
    gpucheck        a separate process: torch computes on each GPU
    linkcheck       a separate process: one node's part of the bandwidth test
    judge           which nodes are bad, by the reports of all; verdict: the result
    variables       environment variables that stop a run, and misspelt names
    explain         why a run failed: its records, its job, its logs (logs; patterns: known lines in them)

`recipes/doctor.py` is the command. Only it may import this package. Besides gpucheck and linkcheck, no module imports torch.
"""
