"""Commands that `spec.health.probes` may name: probes that ship with us, and run in the trainer container.

Each is a process of its own with node-problem-detector's contract, so it may import what the watch may not, where the
image has it. Checks that run in the watch's process are in `unbroken.watch.checks`.
"""
