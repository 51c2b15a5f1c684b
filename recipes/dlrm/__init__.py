"""Click prediction with DLRM and DCN-V2."""
