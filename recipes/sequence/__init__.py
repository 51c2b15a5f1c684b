"""Next-item recommendation with SASRec, BERT4Rec and HSTU."""
