"""Identity and place of this process: rank, hosts, network, GPUs. Standard library only. All other
packages may import it.
"""
