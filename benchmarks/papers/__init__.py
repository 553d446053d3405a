"""The papers' settings without devices: tables, and whether the papers' orders come out."""
