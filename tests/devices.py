"""Devices that are not there: a driver's library for GPUs, compiled here, and files as /sys and /proc have them."""

import os
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).parent / "data/nvml_stub.c"


def compile_library(folder: Path) -> Path:
    """Compile the library into a folder, for LD_LIBRARY_PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "libnvidia-ml.so.1"
    command = ["gcc", "-O1", "-w", "-shared", "-fPIC", f"-Wl,-soname,{name}", str(SOURCE), "-o", str(folder / name)]
    subprocess.run(command, check=True)
    return folder


class Gpus:
    """The state of one pod's GPUs, two unless told otherwise."""

    def __init__(self, library: Path, folder: Path, pod: str = "", **state: int) -> None:
        """`pod`: whose they are, where several pods share a folder; "": everybody's."""
        folder.mkdir(parents=True, exist_ok=True)
        self._base = folder / "gpus"
        self.path = folder / (f"gpus.{pod}" if pod else "gpus")
        self._library = library
        self._state: dict[str, int] = {}
        events = Path(f"{self.path}.events")
        os.mkfifo(events)
        self._events = os.open(events, os.O_RDWR)
        self.set(state)

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process load the library and find this state."""
        return {"LD_LIBRARY_PATH": str(self._library), "NVML_STUB": str(self._base)}

    def set(self, state: Mapping[str, int] | None = None, **more: int) -> None:
        """Change some of it; readers see all of a change or none."""
        self._state |= {**(state or {}), **more}
        fresh = Path(f"{self.path}.new")
        fresh.write_text("".join(f"{key} {value}\n" for key, value in self._state.items()))
        fresh.replace(self.path)

    def emit(self, device: int, xid: int, times: int = 1) -> None:
        """Report an event."""
        os.write(self._events, struct.pack("=II", device, xid) * times)

    def close(self) -> None:
        """Close the FIFO."""
        os.close(self._events)


class System:
    """A root folder with files as /sys, /proc and /dev have them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str | int) -> None:
        """Write a file, in place: readers keep it open. At once: the kernel shows no half of it either."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        content = f"{text}\n".encode()
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
        try:
            os.pwrite(descriptor, content.ljust(os.fstat(descriptor).st_size, b"\n"), 0)
        finally:
            os.close(descriptor)

    def add_adapter(self, name: str, number: int, bus_id: str, ports: int = 1) -> None:
        """Add an InfiniBand adapter that the pod has, with active ports."""
        (self.root / "dev/infiniband").mkdir(parents=True, exist_ok=True)
        (self.root / f"dev/infiniband/uverbs{number}").touch()
        self.write(f"/sys/class/infiniband_verbs/uverbs{number}/ibdev", name)
        device = self.root / f"sys/devices/{bus_id}"
        device.mkdir(parents=True, exist_ok=True)
        folder = self.root / f"sys/class/infiniband/{name}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "device").symlink_to(device)
        for port in range(1, ports + 1):
            self.set_port(f"{name}/{port}", "4: ACTIVE")
            self.count(f"{name}/{port}", link_downed=0, symbol_error=0)

    def set_port(self, port: str, state: str) -> None:
        """Set the state of an adapter's port."""
        adapter, _, number = port.partition("/")
        self.write(f"/sys/class/infiniband/{adapter}/ports/{number}/state", state)

    def count(self, port: str, **counters: int) -> None:
        """Set counters of an adapter's port."""
        adapter, _, number = port.partition("/")
        for name, value in counters.items():
            self.write(f"/sys/class/infiniband/{adapter}/ports/{number}/counters/{name}", value)

    def add_interface(self, name: str, state: str = "up", *, has_device: bool = True) -> None:
        """Add a network interface."""
        self.write(f"/sys/class/net/{name}/operstate", state)
        if has_device:
            (self.root / f"sys/class/net/{name}/device").mkdir(exist_ok=True)

    def set_errors(self, bus_id: str, fatal: int = 0, nonfatal: int = 0, correctable: int = 0) -> None:
        """Set what the kernel has counted of a PCI device."""
        folder = f"/sys/bus/pci/devices/{bus_id}"
        self.write(f"{folder}/aer_dev_fatal", f"Undefined 0\nDLP 0\nTOTAL_ERR_FATAL {fatal}")
        self.write(f"{folder}/aer_dev_nonfatal", f"Undefined 0\nTOTAL_ERR_NONFATAL {nonfatal}")
        self.write(f"{folder}/aer_dev_correctable", f"RxErr 0\nTOTAL_ERR_COR {correctable}")

    def set_pressure(self, full: float) -> None:
        """Set the memory pressure of the container."""
        text = f"some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60={full:.2f} avg300=0.00 total=0"
        self.write("/sys/fs/cgroup/memory.pressure", text)

    def set_kills(self, num: int) -> None:
        """Set how many processes the kernel has killed for want of memory."""
        self.write("/sys/fs/cgroup/memory.events", f"low 0\nhigh 0\nmax 0\noom 0\noom_kill {num}")
