"""Several ranks that write one store.

checkpoint_requests   checkpoints that a rank, a clock or another process asks for
joining               how ranks find each other when a run starts
request_notes         the notes that ask for a checkpoint and announce one
rank_group            the ranks as one rank sees them: notes, waiting, agreement
rank_notes            where ranks leave notes: memory, the store, torch.distributed
world_records         the objects below ``worlds/`` in a store
redistribution        the plan that gives the episodes of M ranks to N ranks
partitions            which rank gets which episode
partition_report      counts of kept, dropped and truncated episodes
incomplete_episodes   why an episode is incomplete, and what happens to it
"""
