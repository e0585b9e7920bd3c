"""What we verify. Each check answers with a finding: verdict, evidence, remedy."""
