"""Files of a run and of other people, read and written safely, on disk and in object stores. Imports only `errors`."""
