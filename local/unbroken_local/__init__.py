"""A Kubernetes small enough for a laptop: API server, scheduler and kubelet in Python, pods as processes.

    daemon, control, cluster                  the process, its commands, and the parts that it runs
    inventory, lifecycle, detection, proxy    the nodes file, silent nodes, is a scheduler there already, Services
    apiserver, scheduler, kubelet             what Kubernetes has; they meet at the API server alone
    kube, processes, addresses                client, processes that end with their owner, loopback addresses
    demo                                      `make demo`, a client of all this

Nothing here imports operator or sidecar: as in any cluster, they run in it.
"""
