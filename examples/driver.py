#!/usr/bin/env python3
"""A driver for the urnic function, in the words of docs/reference/device.md: lets a queue pair send to
itself and write into its own memory. `urnic serve --socket PATH` is the function.

    driver.py PATH [--show]        --show prints the bytes of each command and completion
"""

import array
import json
import mmap
import os
import socket
import struct
import sys
import time

MEMORY, LENGTH = 0x10_0000, 1 << 20  # the DMA addresses of our memory, as we choose them
COMMANDS, COMPLETIONS, RECORD, SENDS, RECEIVES, CQ, CQ_RECORD, DATA = range(0, 8 * 0x4000, 0x4000)
LOG = 4  # log2 of the entries of every ring
VERSION, DMA_MAP, REGION_INFO, REGION_READ, REGION_WRITE = 1, 2, 5, 9, 10


class Function:
    """The PCI function that a socket serves (section 13; vfio-user 0.1)."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.call(VERSION, struct.pack("<HH", 0, 1) + json.dumps({"capabilities": {}}).encode() + b"\0")
        file = os.memfd_create("driver")
        os.ftruncate(file, LENGTH)
        self.memory = mmap.mmap(file, LENGTH)
        self.call(DMA_MAP, struct.pack("<IIQQQ", 32, 3, 0, MEMORY, LENGTH), file)
        _, fds = self.call(REGION_INFO, struct.pack("<IIIIQQ", 32, 0, 2, 0, 0, 0))
        self.pages = mmap.mmap(fds[0], 0)
        self.call(REGION_WRITE, struct.pack("<QIIH", 4, 7, 2, 6))  # PCI: decode memory, be bus master

    def call(self, command, payload, file=None):
        """Sends a message; returns the payload and the descriptors of its reply."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))] if file is not None else []
        self.socket.sendmsg([struct.pack("<HHIII", 1, command, 16 + len(payload), 0, 0) + payload], rights)
        header, fds, _, _ = socket.recv_fds(self.socket, 16, 8)
        if len(header) < 16:
            raise ConnectionError("the server closed the connection")
        _, _, size, flags, error = struct.unpack("<HHIII", header)
        if flags & 32:
            raise OSError(error, os.strerror(error))
        return self.socket.recv(size - 16, socket.MSG_WAITALL) if size > 16 else b"", fds

    def read(self, register):
        reply, _ = self.call(REGION_READ, struct.pack("<QII", register, 0, 4))
        return struct.unpack("<I", reply[16:])[0]

    def write(self, register, value):
        self.call(REGION_WRITE, struct.pack("<QIII", register, 0, 4, value))

    def doorbell(self, kind, queue, index):
        """Rings for a queue (section 5), and wakes the device if it sleeps."""
        number, slot = queue
        self.pages[slot : slot + 8] = struct.pack("<Q", kind << 56 | number << 32 | index)
        if self.pages[0xFF8:0xFFC] != b"\0\0\0\0":
            self.write(0x38, 1)


class Driver:
    """Command queue, queue pair and completion queue."""

    def __init__(self, function, show):
        self.function, self.memory, self.show, self.commands = function, function.memory, show, 0
        if function.read(0x00) != 0x696E_7275 or function.read(0x04) >> 16 != 3:
            raise RuntimeError("another device")
        function.write(0x0C, 2)  # RESET
        self.wait(lambda: function.read(0x0C) & 2 == 0)
        function.write(0x1C, LOG)
        for register, place in ((0x20, COMMANDS), (0x28, COMPLETIONS)):
            function.write(register, MEMORY + place)
            function.write(register + 4, 0)
        function.write(0x0C, 1)  # ENABLE
        self.wait(lambda: self.is_ready())

    def is_ready(self):
        """Whether the device executes commands; a fatal error raises."""
        status = self.function.read(0x08)
        if status & 2:
            raise RuntimeError(f"the device stopped: FATAL, with FATAL_CODE {self.function.read(0x10)}")
        return status & 1 != 0

    def command(self, opcode, payload=b""):
        """Executes a command (section 3); returns the payload of its completion."""
        place = self.commands % (1 << LOG)
        phase = 1 - self.commands // (1 << LOG) % 2
        entry = struct.pack("<HHIQQII", opcode, self.commands & 0xFFFF, 0, 0, 0, 0, 0) + payload
        self.memory[COMMANDS + 128 * place : COMMANDS + 128 * (place + 1)] = entry.ljust(128, b"\0")
        self.commands += 1
        self.function.write(0x30, self.commands)
        at = COMPLETIONS + 64 * place
        self.wait(lambda: self.memory[at + 0x3C] & 1 == phase)
        completion = self.memory[at : at + 64]
        if self.show:
            print(f"> {entry.rstrip(bytes(1)).hex(' ', -4)}\n< {completion[:16].hex(' ', -4)} ...")
        status = struct.unpack_from("<H", completion, 2)[0]
        if status:
            raise RuntimeError(f"command {opcode}: status {status}")
        return completion[8:56]

    def wait(self, condition):
        """Waits for the device, for ten seconds at most and while it has no fatal error."""
        begin = look = time.monotonic()
        while not condition():
            now = time.monotonic()
            if now > look + 0.1:
                look = now
                self.is_ready()
            if now > begin + 10:
                raise TimeoutError("the device does not answer")

    def put(self, place, layout, *values):
        struct.pack_into(layout, self.memory, place, *values)


def main(path, show):
    driver = Driver(Function(path), show)
    number = struct.Struct("<I").unpack_from
    pd = number(driver.command(10))[0]  # AllocPd
    rights = 1 | 2  # LOCAL_WRITE, REMOTE_WRITE
    region = struct.pack("<QQQIIII", 0, 0x1000, MEMORY + DATA, pd, rights, 0, 0)
    stag = number(driver.command(16, region))[0]  # CreateMr, with addresses from 0 on
    # CreateCq: no event queue, and doorbell page 0, the driver's own.
    cq = number(driver.command(24, struct.pack("<QQIIII", MEMORY + CQ, MEMORY + CQ_RECORD, LOG, 0, 0, 0)))[0]
    pair = struct.pack("<QQQ", MEMORY + SENDS, MEMORY + RECEIVES, MEMORY + RECORD)
    pair += struct.pack("<12I", pd, cq, cq, 0, 0, 7, LOG, LOG, 5, 0, 0, 0)  # label 7; a receive has 32 bytes
    qp = struct.unpack_from("<II", driver.command(32, pair))  # CreateQp: its number, and its slot
    for state in (1, 2, 3):  # Init, Rtr, Rts; with remote rights
        driver.command(33, struct.pack("<8I", qp[0], 1 | 2, state, rights, 0, 0, 0, 0))
    driver.command(56, struct.pack("<10IQ", 0, qp[0], 0, 0, 0, 1, 0, 0, 0, 0, 0))  # LoopbackAttach

    driver.memory[DATA : DATA + 5] = b"hello"
    driver.put(RECEIVES, "<QHHIQII", 100, 1, 0, 0, 0x100, 64, stag)
    driver.put(RECORD + 4, "<I", 1)
    driver.function.doorbell(2, qp, 1)
    # A Send and an RDMA Write, each in a block of 64 bytes, with a completion.
    driver.put(SENDS, "<BBBBIQQIIQII", 0, 1, 1, 1, 0, 101, 0, 0, 0, 0, 5, stag)
    driver.put(SENDS + 64, "<BBBBIQQIIQII", 3, 1, 1, 1, 0, 102, 0x200, stag, 0, 0, 5, stag)
    driver.put(RECORD, "<I", 2)
    driver.function.doorbell(1, qp, 2)

    for entry in range(3):
        at = CQ + 64 * entry
        driver.wait(lambda: driver.memory[at + 60] & 1 == 1)
        cookie, label, _, length, _, _, status = struct.unpack_from("<QIIIIBB", driver.memory, at)
        print(f"completion of request {cookie}: status {status}, {length} B, queue pair {label}")
    sent, written = driver.memory[DATA + 0x100 : DATA + 0x105], driver.memory[DATA + 0x200 : DATA + 0x205]
    print(f"received {sent.decode()!r}, written {written.decode()!r}")
    return 0 if sent == written == b"hello" else 1


if __name__ == "__main__":
    paths = [argument for argument in sys.argv[1:] if argument != "--show"]
    if len(paths) != 1 or paths[0].startswith("-"):
        sys.exit("usage: driver.py PATH [--show]      PATH: the socket of urnic serve")
    try:
        sys.exit(main(paths[0], "--show" in sys.argv))
    except (OSError, RuntimeError) as error:
        sys.exit(f"driver.py: {paths[0]}: {error}")
