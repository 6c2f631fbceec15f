"""Hidden states: the target model is run over recorded answers, and its layers' outputs become files."""
