"""From model, cluster, workload and SLOs to the placement with the most goodput per device."""
