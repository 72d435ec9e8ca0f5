"""`python -m urnic ARGUMENTS` is `urnic ARGUMENTS`."""

import os
import sys

from urnic import program


def main():
    os.execv(program(), ["urnic", *sys.argv[1:]])


if __name__ == "__main__":
    main()
