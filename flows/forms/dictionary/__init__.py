"""What TRL's, verl's and OpenRLHF's options mean here, for `translate`, for answers to wrong keys and for the page."""
