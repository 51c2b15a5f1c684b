"""Next-item recommendation with SASRec, BERT4Rec, HSTU and TIGER."""
