"""What all scenarios share: workers, trials, statistics, tables, plots, records and reports."""
