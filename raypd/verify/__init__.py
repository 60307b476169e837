"""After a run: prove that nothing is lost, list failed documents, retry and export."""
