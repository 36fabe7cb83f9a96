"""One kubelet for each fake node: it runs the containers of its pods as local processes.

    decide, status, restart, paths                  pure: what to do next, what to tell the API server
    environment, images                             what a container is given; they also read this machine
    pod, container, probes, volumes, node, logs     shells: processes, files, sockets, the API server

There are no namespaces here. A pod has its own loopback address but sees every port of the machine; a container has its
own folders but sees every file, and its mount paths are not where its spec says: see `paths`.
"""
