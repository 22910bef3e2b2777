"""Who and where this process is: rank, hosts, network, GPUs. Standard library only; all other rooms may import it."""
