"""A process with something in it that the probe takes for an engine core. Imports no kvtop."""

import ctypes
import signal
import sys
import threading
import time


class Block:
    def __init__(self, block_id):
        self.block_id = block_id
        self.ref_cnt = 0
        self._block_hash = None
        self.is_null = block_id == 0


class Queue:
    num_free_blocks = 7


class Pool:
    def __init__(self):
        self.blocks = [Block(number) for number in range(8)]
        self.null_block = self.blocks[0]
        self.free_block_queue = Queue()

    def get_new_blocks(self, count):
        return []

    def free_blocks(self, blocks):
        return None

    def touch(self, blocks):
        return None


class Manager:
    def __init__(self):
        self.req_to_blocks = {}
        self.block_size = 16


class Coordinator:
    def __init__(self, pool):
        self.block_pool = pool
        self.single_type_managers = [Manager()]


class Cache:
    def __init__(self):
        self.block_pool = Pool()
        self.coordinator = Coordinator(self.block_pool)

    def allocate_slots(self, request, count):
        return None


class Scheduler:
    def __init__(self):
        self.kv_cache_manager = Cache()
        self.requests = {}
        self.running = []
        self.waiting = []

    def schedule(self):
        return None

    def _preempt_request(self, request, when):
        return None


class EngineCore:
    def __init__(self):
        self.scheduler = Scheduler()

    def run_busy_loop(self, mode):
        signal.signal(signal.SIGUSR1, lambda *_: None)
        print("up", flush=True)
        if mode == "idle":
            threading.Event().wait()
        if mode == "pause":
            # Waits in C until a signal comes, and then goes on stepping.
            signal.pause()
            mode = "steps"
        if mode == "stuck":
            # A C function that waits without giving the GIL away, until a signal comes.
            ctypes.PyDLL(None).poll(None, 0, -1)
            print("on", flush=True)
            mode = "steps"
        while mode == "steps":
            self.scheduler.schedule()
            time.sleep(0.001)
        # Busy: never in a system call, and most of the time inside malloc.
        kept = []
        while True:
            self.scheduler.schedule()
            kept = [bytes(size * 37) for size in range(500)]
            del kept


if len(sys.argv) > 2 and sys.argv[2] == "poller":
    import select
    import socket

    pair = socket.socketpair()
    threading.Thread(target=lambda: select.select([pair[0]], [], []), daemon=True).start()

if sys.argv[1] == "nothing":
    print("up", flush=True)
    threading.Event().wait()
EngineCore().run_busy_loop(sys.argv[1])
