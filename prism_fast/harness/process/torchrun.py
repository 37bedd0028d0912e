"""torchrun itself, bound to its referee's life: `python -m prism_fast.harness.process.torchrun ...`."""

from prism_fast.harness.process.die_with_parent import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    from torch.distributed.run import main

    main()
