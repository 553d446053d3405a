"""What options of TRL, verl and OpenRLHF mean here, for `translate`, for a wrong key's answer and for the page."""
