"""Where step time goes: machine facts, throughput profiles, probes (docs/profiles.md). Nothing here reaches a score."""
