# A bucket on AWS, and the rights that a job needs in it:
#   cd infra && terraform init && terraform apply -var bucket=my-features
# Features, corpora and job files may share it. More buckets to read: -var 'sources=["my-corpus"]'

terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.0"
    }
  }
}

variable "bucket" {
  description = "Name of the new bucket."
  type        = string
}

variable "sources" {
  description = "Names of further buckets that jobs read."
  type        = list(string)
  default     = []
}

variable "kms_keys" {
  description = "ARNs of the KMS keys of these buckets, where they are encrypted with keys of your own."
  type        = list(string)
  default     = []
}

resource "aws_s3_bucket" "earmill" {
  bucket = var.bucket
}

resource "aws_s3_bucket_public_access_block" "earmill" {
  bucket                  = aws_s3_bucket.earmill.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

# Parts of an upload whose process was killed are no object, but are billed. No rule lets objects
# expire: a dataset names all of its files.
resource "aws_s3_bucket_lifecycle_configuration" "earmill" {
  bucket = aws_s3_bucket.earmill.id

  rule {
    id     = "abandoned-uploads"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }
}

data "aws_iam_policy_document" "job" {
  statement {
    sid       = "List"
    actions   = ["s3:ListBucket"]
    resources = [aws_s3_bucket.earmill.arn]
  }

  statement {
    sid       = "ReadAndWrite"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    resources = ["${aws_s3_bucket.earmill.arn}/*"]
  }

  dynamic "statement" {
    for_each = var.sources
    content {
      actions   = ["s3:ListBucket", "s3:GetObject"]
      resources = ["arn:aws:s3:::${statement.value}", "arn:aws:s3:::${statement.value}/*"]
    }
  }

  dynamic "statement" {
    for_each = var.kms_keys
    content {
      actions   = ["kms:Decrypt", "kms:GenerateDataKey"]
      resources = [statement.value]
    }
  }
}

# EC2 nodes, tasks of AWS Batch, and pods of EKS with Pod Identity may take the role.
data "aws_iam_policy_document" "job_trust" {
  statement {
    actions = ["sts:AssumeRole", "sts:TagSession"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com", "ecs-tasks.amazonaws.com", "pods.eks.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "job" {
  name               = "earmill-job"
  assume_role_policy = data.aws_iam_policy_document.job_trust.json
}

resource "aws_iam_role_policy" "job" {
  name   = "bucket"
  role   = aws_iam_role.job.id
  policy = data.aws_iam_policy_document.job.json
}

# For the nodes of infra/ray-cluster.yaml.
resource "aws_iam_instance_profile" "job" {
  name = "earmill-job"
  role = aws_iam_role.job.name
}

# The head of infra/ray-cluster.yaml also starts and ends the workers, and gives them their profile.
data "aws_iam_policy_document" "head" {
  statement {
    sid       = "StartWorkers"
    actions   = ["ec2:RunInstances", "ec2:CreateTags", "ec2:DescribeInstances"]
    resources = ["*"]
  }

  statement {
    sid       = "EndWorkers"
    actions   = ["ec2:TerminateInstances"]
    resources = ["*"]

    condition {
      test     = "StringEquals"
      variable = "aws:ResourceTag/ray-cluster-name"
      values   = ["earmill"]
    }
  }

  statement {
    sid       = "GiveThemTheirProfile"
    actions   = ["iam:PassRole"]
    resources = [aws_iam_role.job.arn]
  }
}

data "aws_iam_policy_document" "head_trust" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "head" {
  name               = "earmill-head"
  assume_role_policy = data.aws_iam_policy_document.head_trust.json
}

resource "aws_iam_role_policy" "head" {
  name   = "workers"
  role   = aws_iam_role.head.id
  policy = data.aws_iam_policy_document.head.json
}

resource "aws_iam_role_policy" "head_bucket" {
  name   = "bucket"
  role   = aws_iam_role.head.id
  policy = data.aws_iam_policy_document.job.json
}

resource "aws_iam_instance_profile" "head" {
  name = "earmill-head"
  role = aws_iam_role.head.name
}

# The nodes of infra/ray-cluster.yaml pull the image. Remove this where your registry is not Amazon's.
resource "aws_iam_role_policy_attachment" "pull" {
  for_each   = toset([aws_iam_role.job.name, aws_iam_role.head.name])
  role       = each.value
  policy_arn = "arn:aws:iam::aws:policy/AmazonEC2ContainerRegistryPullOnly"
}

output "role" {
  description = "For kubernetes-account.yaml and aws-batch.json."
  value       = aws_iam_role.job.arn
}
