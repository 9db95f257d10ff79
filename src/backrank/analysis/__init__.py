"""From committed rows to verdicts, tables, figures and a report. Imports no torch."""
