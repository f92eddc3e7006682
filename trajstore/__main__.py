"""``python -m trajstore``: the command line."""

from trajstore.cli.app import main

if __name__ == "__main__":
    main()
