"""The `epilora` command: `demo`, `finetune`, `doctor`, `bench` and `tune`."""
