"""`unbroken run` with ::1 as the address of its pod and its rendezvous, written as `$(POD_IP)` would be."""

import sys

from unbroken.run import loopback_block, main


class OnIPv6(loopback_block.LoopbackBlock):
    """All of a job's addresses are the only one that IPv6 has for this machine: enough for one pod."""

    @property
    def rendezvous(self) -> str:
        """Address of the rendezvous."""
        return "::1"

    def next_pod(self) -> str:
        """Return the address of the next pod."""
        return "::1"


if __name__ == "__main__":
    from unbroken.run import command

    vars(command)["LoopbackBlock"] = OnIPv6
    sys.exit(main(sys.argv[1:]))
