"""What HTTP and the command line show of a node: `node_view` builds the structs of `kvxferd.records`."""
