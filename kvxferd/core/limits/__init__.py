"""What users and peers may hold of one node: `table` has a row for each limit, `ledger` counts who has it."""
