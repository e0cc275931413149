"""Creates the Kubernetes objects of each GraphDeployment and keeps them equal to its specification."""
