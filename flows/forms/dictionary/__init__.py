"""What options of TRL, verl and OpenRLHF mean here: for `translate`, for answers to wrong keys, and for the page."""
