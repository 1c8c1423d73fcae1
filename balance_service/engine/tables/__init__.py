"""Tables: compacted topics kept in stores, row by row with their versions, for streams to be joined with."""
