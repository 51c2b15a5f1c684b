"""Next-item recommendation with SASRec and HSTU."""
