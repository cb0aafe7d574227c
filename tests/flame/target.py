"""A busy process with known hot functions and a child of the same kind."""

import subprocess
import sys
import threading


def allocate_slots(rounds: int) -> int:
    total = 0
    for number in range(rounds):
        total += number * number
    return total


def forward(rounds: int) -> int:
    total = 0
    for number in range(rounds):
        total += number
    return total


def busy_loop() -> None:
    while True:
        allocate_slots(600)
        forward(6000)


if __name__ == "__main__":
    if "child" in sys.argv:
        subprocess.Popen([sys.executable, __file__, "--api-key", "sk-very-secret"])
    threading.Thread(target=threading.Event().wait, name="sleepy; one", daemon=True).start()
    if "idle" in sys.argv:
        print("up", flush=True)
        threading.Event().wait()
    print("up", flush=True)
    busy_loop()
